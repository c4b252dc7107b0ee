"""The same numbers as the plain methods, faster. Each kernel is tested against its plain definition."""
