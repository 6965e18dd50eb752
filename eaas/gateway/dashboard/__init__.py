"""What an operator sees of a cluster: one view-model (board.py), composed here, drawn by the page and `eaas top`."""
