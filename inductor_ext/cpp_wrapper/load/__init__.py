"""Loading packages and calling the models in them."""
