"""What happens when a rank dies, fails, does not come or calls something else; other rooms use its watchdog and events."""
