//! The checkpoint store: a create-only log over any object store.
//!
//! Nothing is built here yet. It will hold the commit log, publish, restore, retention, sweep and
//! check, over `dyn ObjectStore`; what it will never do is compress.
#![forbid(unsafe_code)]
