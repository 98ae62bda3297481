"""Why a plan is as it is, what it costs and what would change it; plans side by side. No torch here."""
