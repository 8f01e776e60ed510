"""How machines are brought up and jobs submitted; nothing of the project imports from here."""
