"""The certificate: the same problem as an integer programme, solved by another method."""
