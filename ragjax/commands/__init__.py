"""Commands that an operator runs beside the server."""
