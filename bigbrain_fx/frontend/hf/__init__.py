"""A Hugging Face configuration -> its model, a batch that it takes, and its weights."""
