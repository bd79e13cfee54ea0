"""Where state and chunks live. Stores store; they know no rules."""
