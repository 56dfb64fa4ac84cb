//! Faults to be injected below a [`Store`](crate::Store): for tests and chaos, through `Store::with_faults`.
//!
//! Faults strike at the level of single requests, below the store's own reading back, so that this is tested too.

use std::sync::{Arc, Mutex, PoisonError};

/// Which requests fail, and how. Clones share one count of calls.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    inner: Arc<Mutex<Inner>>,
}

impl FaultPlan {
    /// No faults; counts the calls.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The `nth` request of this kind, counted from 0, fails so.
    #[must_use]
    pub fn fail(self, call: Call, nth: u64, fault: Fault) -> Self {
        self.with(|inner| inner.rules.push((call, Some(nth), fault)));
        self
    }

    /// Every request of this kind fails so.
    #[must_use]
    pub fn always(self, call: Call, fault: Fault) -> Self {
        self.with(|inner| inner.rules.push((call, None, fault)));
        self
    }

    /// From the `nth` request of any kind on, counted from 0, nothing works any more: as if the caller had died there.
    #[must_use]
    pub fn crash_at(self, nth: u64, point: CrashPoint) -> Self {
        self.with(|inner| inner.crash = Some((nth, point)));
        self
    }

    /// The object with this key is gone: reads don't find it, listings don't show it.
    #[must_use]
    pub fn lose(self, key: impl Into<String>) -> Self {
        self.with(|inner| inner.lost.push(key.into()));
        self
    }

    /// How many requests were made.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.with(|inner| inner.calls)
    }

    /// Counts a request, and says how it fails.
    pub(crate) fn next(&self, call: Call) -> Option<Fault> {
        self.with(|inner| {
            let all = inner.calls;
            inner.calls += 1;
            let of_kind = &mut inner.of_kind[call as usize];
            let nth = *of_kind;
            *of_kind += 1;
            if let Some((crash, point)) = inner.crash
                && all >= crash
            {
                let is_after = all == crash && point == CrashPoint::After;
                return Some(if is_after { Fault::After } else { Fault::Before });
            }
            let mut rules = inner.rules.iter();
            rules
                .find(|(c, n, _)| *c == call && n.is_none_or(|n| n == nth))
                .map(|(_, _, fault)| *fault)
        })
    }

    pub(crate) fn is_lost(&self, key: &str) -> bool {
        self.with(|inner| inner.lost.iter().any(|lost| lost == key))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> T {
        act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The kind of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// Store, replacing what is there.
    Put,
    /// Store only if nothing is there.
    Create,
    /// Read a range.
    Read,
    /// Ask for an object's length.
    Head,
    /// List.
    List,
    /// Delete.
    Delete,
}

/// How a request fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It fails and had no effect.
    Before,
    /// It has its effect, and then is said to have failed.
    After,
    /// A create has no effect and is answered with "exists": what a 409 looks like.
    Exists,
    /// A read comes with one bit flipped.
    Corrupt,
    /// A read comes without its last byte, and no error.
    Short,
    /// A write is said to have succeeded and had no effect.
    Lost,
}

/// Where in the fatal request a crash strikes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CrashPoint {
    /// Before it had its effect.
    Before,
    /// After it had its effect, before the answer.
    After,
}

#[derive(Debug, Default)]
struct Inner {
    rules: Vec<(Call, Option<u64>, Fault)>,
    crash: Option<(u64, CrashPoint)>,
    lost: Vec<String>,
    calls: u64,
    of_kind: [u64; 6],
}
