//! What the allocator keeps of memory that was freed.

#![expect(unsafe_code, reason = "a setting of the C library")]

/// Has large blocks go back to the system when they are freed.
///
/// glibc maps blocks of 128 KiB and more, and unmaps them; but with each one that is freed it raises that limit, to
/// 32 MiB at most, and what it would give back at an end of its heap to twice as much. It has up to eight heaps a core.
/// So a service that has compressed large checkpoints would keep hundreds of megabytes which the trainer needs. A limit
/// that is set stays where it is.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn give_back() {
    /// Where glibc itself begins.
    const MAPPED_FROM: libc::c_int = 128 << 10;
    // SAFETY: it takes two numbers, and changes nothing but where later blocks come from, under the allocator's locks.
    let done = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM) };
    if done == 0 {
        tracing::warn!("the C library keeps memory that was freed: its setting was refused");
    }
}

/// Other C libraries do so by themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn give_back() {}
