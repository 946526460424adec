"""As times.js writes them: `Nov 26, 2026, 14:05`."""

DATETIME_FORMAT = "M j, Y, H:i"
DATE_FORMAT = "M j, Y"
TIME_FORMAT = "H:i"
