"""Loading packages and calling the compiled models in them."""
