//! Limits that a command has changed: what the next process has to know of them.
//!
//! Promises: a change holds as long as the next process is told to begin with the limits with which
//! the one before began. Where the user has written other ones down meanwhile, those are newer.

use crate::{Limits, LimitsError};

/// Limits that are not those of the start any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Those of the start.
    pub begun: Limits,
    /// Those in force.
    pub now: Limits,
}

impl Changed {
    /// As words, for another process.
    #[must_use]
    pub fn words(&self) -> [String; 2] {
        [self.begun.to_string(), self.now.to_string()]
    }

    /// Reads [`Changed::words`].
    ///
    /// Errors: they are none.
    pub fn read([begun, now]: &[String; 2]) -> Result<Changed, LimitsError> {
        Ok(Changed { begun: begun.parse()?, now: now.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use crate::Group;

    use super::*;

    fn limits(text: &str) -> Limits {
        text.parse().expect("limits")
    }

    #[test]
    fn a_change_goes_to_the_next_process_unless_that_begins_with_other_limits() {
        let group = Group::new(&limits("iops=10"));
        assert_eq!(group.changed(), None);
        group.set(&limits("iops=20,iops-max=40"));
        let words = group.changed().expect("a change").words();
        let changed = Changed::read(&words).expect("words");
        let next = Group::new(&limits("iops=10"));
        assert!(next.follow(&changed));
        assert_eq!((next.limits(), next.begun()), (group.limits(), group.begun()));
        // The change goes on to the one after that.
        assert_eq!(next.changed(), Some(changed));
        let other = Group::new(&limits("iops=11"));
        assert!(!other.follow(&changed));
        assert_eq!(other.limits(), limits("iops=11"));
        group.set(&limits("iops=10"));
        assert_eq!(group.changed(), None);
    }

    #[test]
    fn no_limits_are_a_change_too_and_rubbish_is_refused() {
        let group = Group::new(&limits("iops=10"));
        group.set(&Limits::default());
        let changed = group.changed().expect("a change");
        assert_eq!(Changed::read(&changed.words()), Ok(changed));
        for words in [["", "none"], ["none", "iops=-1"], ["none", "iops"]] {
            assert!(Changed::read(&words.map(String::from)).is_err(), "{words:?}");
        }
    }

    #[test]
    fn who_watches_hears_of_each_change() {
        use std::sync::{Arc, Mutex};
        let (group, heard) = (Group::new(&Limits::default()), Arc::new(Mutex::new(Vec::new())));
        let list = Arc::clone(&heard);
        group.watch(Box::new(move |group| {
            list.lock().expect("no panic").push(group.changed().map(|changed| changed.now));
        }));
        group.set(&limits("bps=1M"));
        group.set(&Limits::default());
        assert_eq!(*heard.lock().expect("no panic"), [Some(limits("bps=1M")), None]);
    }
}
