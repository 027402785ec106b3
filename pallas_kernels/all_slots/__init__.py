"""No sort: every slot at once, each token keeping what it is routed to."""
