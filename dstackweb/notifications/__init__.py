"""Who is notified of what and how: rules, the notifications that follow from events, and their delivery."""
