//! Mistakes of callers: wrong sizes are refused before anything is read or written, and instruction
//! sets that the machine lacks are not used.

use std::panic::{AssertUnwindSafe, catch_unwind};

use s4_planes::{Kernels, Simd, Width, token_bound};

/// Fails unless `call` panics with a message that contains `part`.
fn refuses(part: &str, call: impl FnOnce()) {
    let panic = catch_unwind(AssertUnwindSafe(call)).expect_err("a size that is refused");
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
    assert!(text.as_ref().is_some_and(|t| t.contains(part)), "{text:?} lacks {part}");
}

#[test]
fn planes_of_other_sizes_are_refused_by_every_layout() {
    for k in Simd::available().map(Kernels::new) {
        let w = Width::B4;
        // Ten values: planes of 10, 10 and 20 bytes, and 2 bytes of signs.
        let (src, mut dst) = ([7u8; 40], [0u8; 40]);
        let mut room = [[0u8; 40]; 4];
        let [s, e, a, b] = &mut room;
        refuses("planes e, a and b", || {
            k.split_fields(w, &src, &mut e[..10], &mut a[..9], &mut b[..20])
        });
        refuses("planes e, a and b", || k.merge_fields(w, &e[..10], &a[..10], &b[..19], &mut dst));
        refuses("planes e, a and b", || {
            k.merge_fields_crc(w, &e[..11], &a[..10], &b[..20], &mut dst, 0);
        });
        refuses("size of the sign plane", || {
            k.split_fields_sign(w, &src, &mut s[..1], &mut e[..10], &mut a[..10], &mut b[..20]);
        });
        refuses("size of the sign plane", || {
            k.merge_fields_sign(w, &s[..3], &e[..10], &a[..10], &b[..20], &mut dst);
        });
        refuses("planes", || k.split_bytes(w, &src, &mut dst[..39]));
        refuses("planes", || k.merge_bytes(w, &src[..36], &mut dst));
        refuses("size of the token plane", || {
            k.split_token(w, &src, &mut e[..11], &mut b[..40]);
        });
        refuses("too small for the bits", || {
            k.split_token(w, &src, &mut e[..10], &mut b[..token_bound(w, 10) - 1]);
        });
        refuses("size of the token plane", || {
            let _ = k.merge_token(w, &e[..9], &b[..0], &mut dst);
        });
        // Nothing was written.
        assert!(dst == [0; 40] && room == [[0; 40]; 4]);
    }
}

#[test]
fn values_that_are_not_whole_and_widths_that_a_layout_lacks_are_refused() {
    let k = Kernels::new(Simd::detect());
    let (mut buf, other) = ([1u8; 30], [2u8; 30]);
    refuses("not a multiple of 4 bytes", || k.to_ordered(Width::B4, &mut buf));
    refuses("not a multiple of 8 bytes", || k.from_ordered(Width::B8, &mut buf));
    let (mut e, mut a, mut b) = ([0; 30], [0; 30], [0; 30]);
    refuses("have no fields", || k.split_fields(Width::B1, &other[..16], &mut e, &mut a, &mut b));
    refuses("operands of XOR", || k.xor(&mut buf, &other[..29]));
    for call in
        [Kernels::sub_ordered, Kernels::add_ordered, Kernels::sub_values, Kernels::add_values]
    {
        refuses("operands of a difference", || call(k, Width::B2, &mut buf, &other[..28]));
    }
    for call in [Kernels::sub_magnitudes, Kernels::add_magnitudes] {
        refuses("operands of a difference", || call(k, Width::B2, &mut buf, &other[..28]));
    }
    refuses("shares", || k.add_shares(Width::B2, 1, &mut buf, &other[..2]));
    refuses("columns", || k.sums(Width::B2, (0, 0, 0), &other[..28], &mut buf));
    refuses("shift of 16 bits", || k.sums(Width::B2, (0, 0, 16), &other, &mut buf));
    refuses("overflows", || {
        token_bound(Width::B8, usize::MAX);
    });
    assert_eq!(buf, [1; 30]);
}

#[test]
fn instruction_sets_have_names_and_one_that_is_missing_is_replaced() {
    let all = [Simd::Scalar, Simd::Neon, Simd::Avx2, Simd::Avx512];
    for set in all {
        assert_eq!(set.to_string().parse(), Ok(set));
        let used = Kernels::new(set).simd();
        assert_eq!(used, if set.is_available() { set } else { Simd::Scalar });
    }
    // No machine has both.
    assert!(!(Simd::Neon.is_available() && Simd::Avx2.is_available()));
    assert!(!Simd::Avx512.is_available() || Simd::Avx2.is_available());
    let here: Vec<Simd> = Simd::available().collect();
    assert_eq!((here.first(), here.last()), (Some(&Simd::Scalar), Some(&Simd::detect())));
    let unknown = "sse2".parse::<Simd>().unwrap_err();
    assert!(unknown.contains("`sse2`") && unknown.contains("avx512"), "{unknown}");
}

#[test]
fn widths_are_powers_of_two() {
    for bytes in 0..40 {
        let width = Width::from_bytes(bytes);
        assert_eq!(width.is_some(), [1, 2, 4, 8].contains(&bytes), "{bytes}");
        assert_eq!(
            width.map(|w| (w.bytes(), w.bits() as usize)),
            width.map(|_| (bytes, 8 * bytes))
        );
    }
}
