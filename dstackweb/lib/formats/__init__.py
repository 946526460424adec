"""How Django writes dates on the admin site, by language."""
