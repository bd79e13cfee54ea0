"""The rules: records and `now` in, records and events out."""
