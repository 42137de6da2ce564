"""How far a setting is from full attention, and what an engine promises of it."""
