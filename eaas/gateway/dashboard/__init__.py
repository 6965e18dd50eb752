"""What an operator sees of a cluster: one view-model, for the terminal and for the page. Pure."""
