//! The service that will run beside a trainer: health, metrics and entitlement.
//!
//! Nothing is built here yet.
#![forbid(unsafe_code)]
