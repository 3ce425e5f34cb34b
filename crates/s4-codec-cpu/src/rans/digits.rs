//! Dividing a state by a frequency below 256, one byte of the quotient at a time.

/// Multiplier and shift that divide by `freq`: for every `n < 256 * freq`
///
/// ```text
/// n / freq == (n + (n * multiplier >> 16)) >> shift
/// ```
///
/// and the sum stays below 2^16. With `s = ceil(log2(freq))`, `2^16 + multiplier` is
/// `2^(16 + s) / freq` rounded up. The error `e` of its product with `freq` is below `freq`, so at
/// most `2^(8 + s) / freq`, which is what makes quotients of 8 bits exact (Granlund and Montgomery,
/// "Division by invariant integers using multiplication", 1994, theorem 4.2).
#[cfg(any(test, target_arch = "x86_64"))]
pub(super) fn reciprocal(freq: u16) -> (u16, u16) {
    debug_assert!((1..=256).contains(&freq));
    let shift = u32::from(freq).next_power_of_two().ilog2();
    let scaled = (1u32 << (16 + shift)).div_ceil(u32::from(freq));
    ((scaled - (1 << 16)) as u16, shift as u16)
}

/// As [`reciprocal`], but for a whole state and frequencies up to 4096: for every
/// `x < 2^24 * freq`, or `x < 2^20 * freq` if `freq` is above 256,
///
/// ```text
/// x / freq == (x + (x * multiplier >> 32)) >> shift
/// ```
///
/// and the sum stays below 2^32, for the same reason: the error is below `freq`, and `freq` at most
/// `2^(8 + s) / freq`, or `2^(12 + s) / freq`.
pub(super) fn reciprocal32(freq: u16) -> (u32, u8) {
    debug_assert!((1..=4096).contains(&freq));
    let shift = u32::from(freq).next_power_of_two().ilog2();
    let scaled = (1u64 << (32 + shift)).div_ceil(u64::from(freq));
    ((scaled - (1 << 32)) as u32, shift as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_of_states_are_exact_where_they_change() {
        for freq in 1..=4096u64 {
            let bits = if freq <= 256 { 24 } else { 20 };
            let (multiplier, shift) = reciprocal32(freq as u16);
            let check = |x: u64| {
                let sum = x + ((x * u64::from(multiplier)) >> 32);
                assert!(sum < 1 << 32, "{x} / {freq}");
                assert_eq!(sum >> shift, x / freq, "{x} / {freq}");
            };
            // The error grows with x, so for each remainder it is largest at the end of the range.
            let top = (freq << bits) - 1;
            (0..4 * freq).for_each(|i| check(top - i));
            for q in (0..1 << bits).step_by(9973) {
                check(q * freq);
                check(q * freq + freq - 1);
            }
        }
    }

    #[test]
    fn every_quotient_is_exact() {
        for freq in 1..=256u16 {
            let (multiplier, shift) = reciprocal(freq);
            for n in 0..256 * u32::from(freq) {
                let sum = n + ((n * u32::from(multiplier)) >> 16);
                assert!(sum < 1 << 16, "{n} / {freq}");
                assert_eq!(sum >> shift, n / u32::from(freq), "{n} / {freq}");
            }
        }
    }
}
