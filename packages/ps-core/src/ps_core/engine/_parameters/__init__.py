"""Store what is known of each parameter, and bind parameters to slots."""
