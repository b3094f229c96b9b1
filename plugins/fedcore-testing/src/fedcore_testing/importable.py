"""Classes that a test defines are set on this module, so that a configuration can name them."""
