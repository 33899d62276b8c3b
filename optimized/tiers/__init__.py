"""The tiers of the prefix cache below the device."""
