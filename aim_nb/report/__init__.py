"""What reads records: tables, claims, figures."""
