//! In each world every virtual rank is served by exactly one member, and each member serves one.

use types::World;

use super::Violation;

/// The name of this invariant.
pub const NAME: &str = "blocks_tile_the_virtual_ranks";

/// Checks a world, by counting.
///
/// # Errors
/// If a virtual rank is served never or twice, or a member serves none.
pub fn check(world: &World) -> Result<(), Violation> {
    let mut served = vec![0_u32; world.virtual_ranks.count() as usize];
    for member in &world.members {
        let mut serves = 0;
        for block in &member.blocks {
            let end = (block.start() + block.span()).min(world.virtual_ranks.count());
            for rank in block.start()..end {
                served[rank as usize] += 1;
                serves += 1;
            }
        }
        if serves == 0 {
            return Err(violation(format!("{world}: node {} serves nothing", member.node)));
        }
    }
    match served.iter().position(|times| *times != 1) {
        Some(rank) => {
            Err(violation(format!("{world}: virtual rank {rank} is served {} times", served[rank])))
        }
        None => Ok(()),
    }
}

fn violation(seen: String) -> Violation {
    Violation { invariant: NAME, seen }
}
