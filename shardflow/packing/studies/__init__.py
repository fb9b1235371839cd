"""One study: its members, fragment, privacy rules and records."""
