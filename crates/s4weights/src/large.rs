//! Buffers of many megabytes: in huge pages where the system gives them on request. Taking memory page
//! by page costs as much as copying into it.

#![expect(unsafe_code, reason = "advice about memory")]

/// An empty buffer with room for `capacity` bytes.
pub(crate) fn with_capacity(capacity: usize) -> Vec<u8> {
    let mut buffer = Vec::with_capacity(capacity);
    advise(buffer.spare_capacity_mut());
    buffer
}

/// A copy of bytes.
pub(crate) fn copy(bytes: &[u8]) -> Vec<u8> {
    let mut buffer = with_capacity(bytes.len());
    buffer.extend_from_slice(bytes);
    buffer
}

/// Asks for huge pages. It is advice: memory is as good without.
#[cfg(target_os = "linux")]
fn advise(room: &mut [std::mem::MaybeUninit<u8>]) {
    /// Where pages begin, or a multiple of it.
    const PAGE: usize = 64 << 10;
    let skip = room.as_ptr().align_offset(PAGE);
    let Some(whole) = room.get_mut(skip..) else { return };
    let len = whole.len() / PAGE * PAGE;
    // SAFETY: whole pages of a buffer that is borrowed; the advice changes nothing in them.
    unsafe { libc::madvise(whole.as_mut_ptr().cast(), len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &mut [std::mem::MaybeUninit<u8>]) {}

#[cfg(test)]
mod tests {
    #[test]
    fn buffers_have_the_room_and_the_bytes_that_were_asked_for() {
        for len in [0, 1, 4096, 100_000, 5 << 20] {
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            assert!(super::copy(&bytes) == bytes, "{len}");
            let empty = super::with_capacity(len);
            assert!(empty.is_empty() && empty.capacity() >= len);
        }
    }
}
