"""Pages for the team's own hosts."""
