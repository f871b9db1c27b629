//! Which operation gets which fault.
//!
//! Promises: the first rule that fits decides, and rules are asked in the order in which the test
//! made them. Equal seeds give equal faults.

use std::ops::Range;
use std::time::Duration;

use ringdisk_storage::Errno;

use super::operation::OpKind;
use super::prng::Prng;

/// What happens to an operation.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It fails and has no effect.
    Fail(Errno),
    /// A write takes effect for so many bytes, then fails. Others: as `Fail`.
    FailAfter(u64, Errno),
    /// A read or write moves at most so many bytes and says so. Others: no fault.
    Short(u64),
    /// It takes effect and ends after this time.
    Delay(Duration),
    /// As `Delay`, with a time that the seed chooses: overtaking is likely.
    DelayBetween(Duration, Duration),
    /// It takes effect and ends when the test releases it.
    Hold,
    /// It never ends and has no effect.
    Hang,
    /// It claims success at once and has no effect. A flush that lies is a barrier that is missing;
    /// reads do not lie.
    Lie,
}

/// What tables of changes and failures let happen to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// It fails with EIO.
    Io,
    /// It fails with ENOSPC.
    NoSpace,
    /// It waits until the test releases it.
    Hold,
}

impl Injected {
    /// All of them.
    pub const ALL: [Injected; 3] = [Injected::Io, Injected::NoSpace, Injected::Hold];

    /// The rule's part of it.
    #[must_use]
    pub fn fault(self) -> Fault {
        match self {
            Injected::Io => Fault::Fail(Errno::IO),
            Injected::NoSpace => Fault::Fail(Errno::NOSPC),
            Injected::Hold => Fault::Hold,
        }
    }
}

/// Which operations a rule is for. Built like
/// `When::kind(OpKind::Write).at(0..4096).skip(2).once()`.
#[derive(Clone, Debug, Default)]
pub struct When {
    kind: Option<OpKind>,
    range: Option<Range<u64>>,
    number: Option<u64>,
    skip: u64,
    times: Option<u64>,
    chance: Option<u64>,
}

impl When {
    /// Every operation.
    pub fn any() -> When {
        When::default()
    }

    /// Operations of one kind.
    pub fn kind(kind: OpKind) -> When {
        When { kind: Some(kind), ..When::default() }
    }

    /// The operation with this number; the first of a storage has number 0.
    pub fn number(number: u64) -> When {
        When { number: Some(number), ..When::default() }
    }

    /// Only those that touch a byte of `range`; a change of the length: whose last byte lies there.
    /// Operations without a range (flush) never do.
    pub fn at(self, range: Range<u64>) -> When {
        When { range: Some(range), ..self }
    }

    /// Lets so many matching operations pass first.
    pub fn skip(self, count: u64) -> When {
        When { skip: count, ..self }
    }

    /// Applies to each matching operation with a chance of so many in a thousand; the seed decides.
    pub fn chance(self, per_mille: u64) -> When {
        When { chance: Some(per_mille), ..self }
    }

    /// Applies so many times, then never again.
    pub fn times(self, count: u64) -> When {
        When { times: Some(count), ..self }
    }

    /// Applies one time.
    pub fn once(self) -> When {
        self.times(1)
    }

    pub(crate) fn rule(self, fault: Fault) -> Rule {
        Rule { when: self, seen: 0, fault }
    }
}

#[derive(Debug)]
pub(crate) struct Rule {
    when: When,
    seen: u64,
    fault: Fault,
}

impl Rule {
    /// The fault for an operation, if this rule is for it. Counts.
    fn take(
        &mut self,
        prng: &mut Prng,
        number: u64,
        kind: OpKind,
        offset: u64,
        len: u64,
    ) -> Option<Fault> {
        let when = &self.when;
        let touches = |range: &Range<u64>| {
            let touched = len > 0 && offset < range.end && range.start < offset.saturating_add(len);
            touched || kind == OpKind::SetLen && range.start < offset && offset <= range.end
        };
        let matches = when.kind.is_none_or(|wanted| wanted == kind)
            && when.number.is_none_or(|wanted| wanted == number)
            && when.range.as_ref().is_none_or(touches);
        if !matches || when.chance.is_some_and(|chance| prng.below(1000) >= chance) {
            return None;
        }
        let place = self.seen;
        self.seen += 1;
        let last = when.times.map_or(u64::MAX, |times| when.skip.saturating_add(times));
        (when.skip <= place && place < last).then(|| self.fault.clone())
    }
}

/// The fault of the first rule that applies. Chooses times.
pub(crate) fn choose(
    rules: &mut [Rule],
    prng: &mut Prng,
    number: u64,
    kind: OpKind,
    offset: u64,
    len: u64,
) -> Option<Fault> {
    let fault = rules.iter_mut().find_map(|rule| rule.take(prng, number, kind, offset, len))?;
    Some(match fault {
        Fault::DelayBetween(from, to) => {
            let span = u64::try_from(to.saturating_sub(from).as_nanos()).unwrap_or(u64::MAX);
            Fault::Delay(from + Duration::from_nanos(prng.below(span.saturating_add(1))))
        }
        fault => fault,
    })
}
