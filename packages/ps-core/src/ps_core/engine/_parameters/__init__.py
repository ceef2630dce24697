"""What is known of each parameter, and binding parameters to slots."""
