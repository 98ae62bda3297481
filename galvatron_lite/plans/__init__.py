"""The plan: schema, reading and writing, explanation."""
