"""Downloads of models, data sets and environments from the Hugging Face hub."""
