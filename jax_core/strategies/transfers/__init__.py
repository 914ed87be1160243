"""What strategies share of what is sent: how, and how many bytes."""
