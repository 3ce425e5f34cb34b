//! What a writer has taken over from others.

use s4_format::manifest::{self, Object, Role, Roles};

/// State taken over from other writers.
#[derive(Debug, Default)]
pub(crate) struct Adopted {
    /// The objects that hold the chunks.
    pub(crate) objects: Vec<Object>,
    /// The parent that deltas among the chunks are predicted from.
    pub(crate) parent: Option<manifest::Parent>,
    roles: Roles,
    /// Parameters of the role table so far.
    parameters: u32,
}

impl Adopted {
    pub(crate) fn bytes(&self) -> u64 {
        self.objects.iter().map(|o| o.bytes).sum()
    }

    /// The merged role table; `None` if no index has one.
    pub(crate) fn take_roles(&mut self) -> Option<Roles> {
        Some(std::mem::take(&mut self.roles)).filter(|r| !r.tensors.is_empty())
    }

    pub(crate) fn add_roles(&mut self, roles: &Roles, first_tensor: usize) {
        // A tensor table has at most 2^22 records.
        let (tensors, groups) = (first_tensor as u32, self.roles.groups.len() as u32);
        let parameters = self.parameters;
        self.roles.groups.extend(roles.groups.iter().cloned());
        for row in &roles.tensors {
            let Role { tensor, parameter, kind, group } = *row;
            let parameter = parameter.saturating_add(parameters);
            self.parameters = self.parameters.max(parameter.saturating_add(1));
            let (tensor, group) = (tensor.saturating_add(tensors), group.saturating_add(groups));
            self.roles.tensors.push(Role { tensor, parameter, kind, group });
        }
    }
}
