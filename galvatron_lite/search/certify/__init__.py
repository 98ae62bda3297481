"""The certificate of a plan: its shape as an integer programme, solved by another method."""
