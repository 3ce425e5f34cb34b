//! Hand-written bindings to NVIDIA's nvCOMP 6, which will be opened at run time from the user's own
//! installation.
//!
//! Nothing is built here yet. What will never be here: the library itself, and its headers.
