//! Wire types and error codes of the control plane.
