//! Differences from a parent.

use s4_delta::Residual;
use s4_format::{Error, ResidualId};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd, Width};

#[test]
fn every_pair_of_patterns_round_trips() {
    for kind in Kind::FLOATS {
        for (name, src) in patterns::all(kind, 77) {
            for (other, parent) in patterns::all(kind, 77) {
                for residual in [Residual::Xor, Residual::Sub, Residual::Magnitude] {
                    for simd in Simd::available() {
                        let kernels = Kernels::new(simd);
                        let mut buf = src.clone();
                        residual.diff(kernels, kind.width, &parent, &mut buf).unwrap();
                        if residual != Residual::Magnitude {
                            assert_eq!(
                                buf.iter().all(|b| *b == 0),
                                src == parent,
                                "{name} {other}"
                            );
                        }
                        residual.apply(kernels, kind.width, &parent, &mut buf).unwrap();
                        assert_eq!(buf, src, "{residual:?} {simd}: {name} from {other}");
                    }
                }
            }
        }
    }
}

#[test]
fn parents_of_another_size_are_refused() {
    for residual in [Residual::Xor, Residual::Sub, Residual::Magnitude] {
        for (parent, len) in [(4, 8), (8, 4), (6, 6)] {
            let (parent, mut buf) = (vec![1; parent], vec![2; len]);
            let error = residual.apply(Kernels::default(), Width::B4, &parent, &mut buf);
            assert!(matches!(error, Err(Error::Corrupt { .. })));
            assert_eq!(buf, vec![2; len]);
        }
    }
}

#[test]
fn ids_are_those_of_the_format() {
    assert_eq!(Residual::Xor.id(), ResidualId::XOR);
    assert_eq!(Residual::Sub.id(), ResidualId::SUB);
    assert_eq!(Residual::Magnitude.id(), ResidualId::MAGNITUDE);
    for id in ResidualId::ALL {
        assert_eq!(Residual::from_id(*id).map(Residual::id), Some(*id).filter(|id| id.0 != 0));
    }
}
