"""Wire form of the router's service, generated from router.proto by `make proto`."""
