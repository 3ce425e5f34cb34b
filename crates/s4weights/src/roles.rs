//! The tensors' roles, as the planner asks for them.

use std::collections::HashMap;

use s4_format::manifest::{Roles, TensorRole};

/// The role table of a checkpoint that is being written, by tensor.
#[derive(Debug)]
pub(crate) struct RoleTable {
    table: Roles,
    /// The first row of each tensor.
    rows: HashMap<u32, usize>,
}

impl RoleTable {
    pub(crate) fn new(table: Roles) -> Self {
        let mut rows = HashMap::with_capacity(table.tensors.len());
        for (row, role) in table.tensors.iter().enumerate() {
            rows.entry(role.tensor).or_insert(row);
        }
        Self { table, rows }
    }

    pub(crate) fn table(&self) -> &Roles {
        &self.table
    }

    /// The role of a tensor, by its number; that of its first row if there are several.
    pub(crate) fn of(&self, tensor: usize) -> Option<TensorRole<'_>> {
        let row = *self.rows.get(&u32::try_from(tensor).ok()?)?;
        Some(TensorRole { row: self.table.tensors.get(row)?, table: &self.table })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;
    use std::sync::{Arc, Mutex};

    use s4_format::DType;
    use s4_format::manifest::{Role, RoleKind};

    use super::*;
    use crate::batch::Batch;
    use crate::{Contents, Error, Sink, Target, TensorSource, WriteOptions, Writer};

    /// What a plan knew of a tensor's role: its kind and its group's learning rate.
    type Known = Option<(RoleKind, Option<f64>)>;

    /// Tensors in the order in which they were planned.
    type Planned = Vec<(String, Known)>;

    thread_local! {
        /// The tensors that this thread planned.
        static PLANNED: RefCell<Planned> = const { RefCell::new(vec![]) };
    }

    /// Notes tensors that are about to be planned.
    pub(crate) fn planned(batch: &Batch<'_>) {
        for (name, tensor) in batch.names.iter().zip(&batch.tensors) {
            let lr = |r: TensorRole<'_>| r.scalars().and_then(|s| s.get("lr").copied());
            let known = tensor.role.map(|r| (r.row.kind, lr(r)));
            PLANNED.with_borrow_mut(|all| all.push(((*name).to_owned(), known)));
        }
    }

    fn roles() -> Roles {
        let row = |tensor, kind| Role { tensor, parameter: 0, kind, group: 1 };
        let group = |lr| [("lr".to_owned(), lr)].into();
        Roles {
            tensors: vec![row(0, RoleKind::Weight), row(3, RoleKind::ExpAvgSq)],
            groups: vec![group(0.5), group(0.25)],
        }
    }

    /// Records what was planned by the time the first chunk comes.
    #[derive(Clone, Default)]
    struct FirstChunk(Arc<Mutex<Option<Planned>>>);

    impl Sink for FirstChunk {
        fn write(&mut self, bytes: &[u8]) -> crate::Result<()> {
            // Only the header, which is short, precedes the chunks.
            if bytes.len() > 1000 {
                self.0.lock().unwrap().get_or_insert_with(|| PLANNED.take());
            }
            Ok(())
        }

        fn commit(self: Box<Self>) -> crate::Result<()> {
            Ok(())
        }

        fn may_move(&self) -> bool {
            false
        }
    }

    fn noise(bytes: usize) -> Vec<u8> {
        let next = |x: &u32| Some(x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
        std::iter::successors(Some(1), next).map(|x| (x >> 24) as u8).take(bytes).collect()
    }

    #[test]
    fn plans_know_roles_and_hyperparameters_before_the_first_chunk() {
        let first = FirstChunk::default();
        let options = WriteOptions { threads: Some(1), ..WriteOptions::default() };
        let target = Target::Sink("a test".into(), Box::new(first.clone()));
        let mut writer = Writer::create(target, options).unwrap();
        writer.declare(roles()).unwrap();
        let data = noise(4 * 5002);
        // No two have the same values.
        let source = |name, first: usize, shape: &'static [u64]| {
            let values = &data[4 * first..][..4 * shape[0] as usize];
            TensorSource::new(name, DType::Float32, shape, values)
        };
        let large = |name, first| source(name, first, &[5000]);
        let (weight, bias) = (large("weight", 0), source("bias", 0, &[10]));
        let tensors = [weight, bias, large("other", 1), large("moment", 2)];
        writer.write(&tensors).unwrap();
        assert!(matches!(writer.declare(Roles::default()), Err(Error::Argument(_))));
        writer.finish(Contents::default()).unwrap();

        let planned = first.0.lock().unwrap().take().unwrap();
        let known = [
            ("weight".to_owned(), Some((RoleKind::Weight, Some(0.25)))),
            ("other".to_owned(), None),
            ("moment".to_owned(), Some((RoleKind::ExpAvgSq, Some(0.25)))),
        ];
        assert_eq!(planned, known);
    }

    #[test]
    fn a_table_may_say_anything() {
        let row = |tensor, kind, group| Role { tensor, parameter: 9, kind, group };
        let tensors = vec![row(7, RoleKind::Weight, 0), row(7, RoleKind::Master, u32::MAX)];
        let table = RoleTable::new(Roles { tensors, groups: vec![] });
        let role = table.of(7).unwrap();
        assert_eq!((role.row.kind, role.scalars()), (RoleKind::Weight, None));
        assert!(table.of(0).is_none() && table.of(usize::MAX).is_none());
    }
}
