"""Downloads from the Hugging Face hub."""
