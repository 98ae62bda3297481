"""What a shape of plan takes at the least: bounds that cut shapes before they are searched, cheapest first."""
