"""The command line and what operators do with it; imports the rest of eaas, and is imported by nothing of it."""
