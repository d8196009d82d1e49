"""Token rows of attention: separate keys and values, latent rows, and keys alone."""
