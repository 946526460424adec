"""The admin site as part of the product: its shell, its areas, and how its lists and forms show things."""
