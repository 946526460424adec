"""The server's processes: supervisor, ticker, periodic work and the tasks that workers call."""
