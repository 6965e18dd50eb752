"""The HTTP gateway: the OpenAI API in front of the attention workers, and the owner of every token log."""
