//! A generation has one member list, wherever it is known; and the log numbers worlds without gaps or repeats.

use std::collections::BTreeMap;
use std::sync::Arc;

use types::{Generation, World};

use super::Violation;

/// The name of this invariant.
pub const NAME: &str = "one_world_per_generation";

/// All worlds that anybody was told, and the last one that the log formed.
#[derive(Clone, Debug, Default)]
pub struct OneWorldPerGeneration {
    told: BTreeMap<Generation, Arc<World>>,
    formed: Generation,
}

impl OneWorldPerGeneration {
    /// Somebody was told a world.
    ///
    /// # Errors
    /// If another one of that generation was told before.
    pub fn check_told(&mut self, world: &Arc<World>) -> Result<(), Violation> {
        let known = self.told.entry(world.generation).or_insert_with(|| Arc::clone(world));
        // Followers of a world may be told with or without the state that its lineage begins with; members may not differ.
        if known.members != world.members
            || known.lineage != world.lineage
            || known.from != world.from
        {
            return Err(violation(format!("{known} and {world}")));
        }
        Ok(())
    }

    /// The log formed a world.
    ///
    /// # Errors
    /// If it does not follow the one before.
    pub fn check_formed(&mut self, generation: Generation) -> Result<(), Violation> {
        let before = std::mem::replace(&mut self.formed, generation);
        if generation != before.next() {
            return Err(violation(format!("the log formed world {generation} after {before}")));
        }
        Ok(())
    }
}

fn violation(seen: String) -> Violation {
    Violation { invariant: NAME, seen }
}
