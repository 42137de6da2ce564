"""What selection methods measure of a layer, and its backends."""
