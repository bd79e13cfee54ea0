"""Finding what a user's saved copies say about a query."""
