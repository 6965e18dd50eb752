"""Wire form of the expert server's control service, generated from experts.proto by `make proto`."""
